"""Faster training steps outside of attention: matching, compiled parts, memory layout."""
