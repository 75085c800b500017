"""Subclasses of transformers' modules that hold gates, and that of deformable attention, without that import."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from mmgate.ops.ms_deform_attn import attention_weights, ms_deform_attn

_KINDS: dict[tuple[type, type], Any] = {}


class Shell(nn.Module):
    """Base of what stands before a host's class in a subclass that is made when a module of the host is met.

    The subclass keeps the signature of the host's ``forward``. It has no name in any module, so that it is pickled by
    its two bases.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _empty, type(self).__bases__, vars(self)


def subclass(shell: type[Shell], host: type[nn.Module]) -> Any:
    """Return the subclass of both, whose ``forward`` is the shell's with the host's signature."""
    if (shell, host) in _KINDS:
        return _KINDS[shell, host]
    run: Callable[..., Any] = vars(shell)['forward']

    @wraps(host.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return run(self, *args, **kwargs)

    members = dict(forward=forward, __module__=shell.__module__)
    return _KINDS.setdefault((shell, host), type(f'Gated{host.__name__}', (shell, host), members))


def _empty(shell: type[Shell], host: type[nn.Module]) -> Any:
    kind = subclass(shell, host)
    return kind.__new__(kind)


class HostedDeformableAttention(Shell):
    """Multi-scale deformable attention on our operator, in the place of transformers' and with its projections.

    The gate is held as ``gate``, without projections of its own; it reads the query with its position.
    """

    gate: Any

    def forward(
        self: Any,
        hidden_states: Tensor,
        *,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor,
        position_embeddings: Tensor | None = None,
        reference_points: Tensor,
        spatial_shapes: Tensor | None = None,
        spatial_shapes_list: Any = None,
        level_start_index: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Attend from queries ``(B, Q, C)`` to the levels of ``encoder_hidden_states``, ``(B, S, C)`` side by side.

        Args:
            hidden_states: The queries.
            attention_mask: ``(B, S)`` bool, False where there is padding; in Mask2Former and OneFormer True.
            encoder_hidden_states: The levels.
            position_embeddings: Added to the queries.
            reference_points: ``(B, Q, L|1, 2)`` as (x, y), or ``(B, Q, L|1, 4)`` as (x, y, w, h), in 0 to 1.
            spatial_shapes: ``(L, 2)`` as (height, width).
            spatial_shapes_list: The same as a list, where there is no tensor.
            level_start_index: ``(L,)``; of levels side by side by default.
            **kwargs: What layers hand to every attention; not used, as in transformers.

        Returns:
            ``(B, Q, C)``, and the weights ``(B, Q, H, L, P)``, in RT-DETRv2, D-FINE and DEIMv2 ``(B, Q, H, L P)``.
        """
        query = hidden_states if position_embeddings is None else hidden_states + position_embeddings
        value = self.value_proj(encoder_hidden_states) if hasattr(self, 'value_proj') else encoder_hidden_states
        if attention_mask is not None:
            padding = attention_mask if self.mask_is_padding else ~attention_mask
            value = value.masked_fill(padding[..., None], 0.0)
        value = value.unflatten(-1, (self.n_heads, -1))  # (B, S, H, d)
        if spatial_shapes is None:
            spatial_shapes = torch.tensor(spatial_shapes_list, device=value.device)
        if level_start_index is None:
            areas = spatial_shapes.prod(-1)
            level_start_index = areas.cumsum(0) - areas
        offsets, logits = sampled(self, query, self.gate.num_points, reference_points)
        gating = self.gate.gating(query)
        levels, options = (spatial_shapes, level_start_index), dict(gating, backend=self.gate.backend)
        output = ms_deform_attn(value, *levels, offsets, logits, reference_points=reference_points, **options)
        weights = attention_weights(logits, **gating)
        output = self.output_proj(output) if hasattr(self, 'output_proj') else output
        return output, weights.flatten(3) if hasattr(self, 'offset_scale') else weights


def sampled(module: Any, query: Tensor, points: int, reference_points: Tensor) -> tuple[Tensor, Tensor]:
    """Return offsets ``(B, Q, H, L, P, 2)`` and logits ``(B, Q, H, L, P)`` of a host's module, gated or not.

    ``query (B, Q, C)`` has its position; P is ``points``; ``reference_points`` are ``(B, Q, L|1, 2 or 4)``.
    """
    sizes = (module.n_heads, module.n_levels, points)
    offsets = module.sampling_offsets(query).unflatten(-1, (*sizes, 2))
    if reference_points.shape[-1] == 4:  # the operator moves points by half a box at most; D-FINE has an option for it
        offsets = offsets * (2 * getattr(module, 'offset_scale', 0.5))
    return offsets, module.attention_weights(query).unflatten(-1, sizes)
