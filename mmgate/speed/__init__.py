"""Make training steps faster outside of attention: matching, compiled modules, memory layout."""
