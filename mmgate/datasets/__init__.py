"""Data sets and transforms of the papers that the hosts lack (SVHN, noise on images), and a check of classes."""
