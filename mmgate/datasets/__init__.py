"""What the papers' recipes need beside the hosts' data sets: SVHN, and noise on images."""
