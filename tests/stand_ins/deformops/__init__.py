"""Stand-in of deformops 3.0.1: the signature of its operator over mmgate's reference."""
