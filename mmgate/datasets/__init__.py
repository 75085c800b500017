"""The papers' data sets and transforms that mm packages lack: the digits of SVHN, and noise on images."""
