"""Additions of our command lines to mmengine's Runner."""
