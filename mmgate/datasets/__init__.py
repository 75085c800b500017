"""Data sets and transforms of the papers that the hosts lack: SVHN and noise on images."""
