"""AgentSD for diffusers: agent attention in Stable Diffusion, without training."""

from .processor import AgentSD, AgentSDProcessor, apply_agent_sd, remove_agent_sd

__all__ = ['AgentSD', 'AgentSDProcessor', 'apply_agent_sd', 'remove_agent_sd']
