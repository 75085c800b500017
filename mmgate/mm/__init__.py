"""Hooks, checks and options that mmgate's command lines add to mmengine's Runner."""
