# DGViT beside ViT on scikit-learn's handwritten digits, trained on clean and on noisy images, tested on clean ones.
# Data: python tools/dataset_converters/digits.py data/digits
# Run:  python tools/analysis_tools/study.py configs/studies/digits.py
runs = dict(
    vit='configs/dgsa/classification/vit_1xb64-40e_digits.py',
    dgvit='configs/dgsa/classification/dgvit_1xb64-40e_digits.py',
    vit_noise='configs/dgsa/classification/vit-noise_1xb64-40e_digits.py',
    dgvit_noise='configs/dgsa/classification/dgvit-noise_1xb64-40e_digits.py')
seeds = [0, 1, 2]
baselines = dict(dgvit_noise='vit_noise')
metric = 'accuracy/top1'
