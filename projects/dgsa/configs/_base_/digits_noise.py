# Section 5.1: noise on the training images; kinds and levels are ours, the paper names none.
noise = dict(
    type='mmgate.RandomNoise',
    kinds=('gaussian', 'salt_and_pepper', 'speckle', 'uniform', 'shot'),
    levels=(0.1, 0.2, 0.4))
