# Attention and feed-forward network of a small ViT on scikit-learn's handwritten digits, trained on clean and on noisy images.
# Data: python tools/dataset_converters/digits.py data/digits
# Run:  python tools/analysis_tools/study.py projects/dgsa/configs/studies/digits.py, and with --budget short for half of the epochs
runs = dict(
    vit='configs/vanilla/classification/vit_1xb64-40e_digits.py',
    vit_swiglu='projects/dgsa/configs/studies/digits/vit-swiglu.py',
    vanilla='projects/dgsa/configs/studies/digits/vanilla-attention.py',
    differential='projects/dgsa/configs/studies/digits/differential.py',
    dgvit='projects/dgsa/configs/dgvit_1xb64-40e_digits.py',
    vit_noise='projects/dgsa/configs/vanilla/vit-noise_1xb64-40e_digits.py',
    vit_swiglu_noise='projects/dgsa/configs/studies/digits/vit-swiglu-noise.py',
    vanilla_noise='projects/dgsa/configs/studies/digits/vanilla-attention-noise.py',
    differential_noise='projects/dgsa/configs/studies/digits/differential-noise.py',
    dgvit_noise='projects/dgsa/configs/dgvit-noise_1xb64-40e_digits.py')
# vanilla, differential and dgvit differ by attention alone; the two ViTs differ from vanilla by the feed-forward network
baselines = dict(
    vit='vanilla', vit_swiglu='vanilla', differential='vanilla', dgvit='vanilla',
    vit_noise='vanilla_noise', vit_swiglu_noise='vanilla_noise', vanilla_noise='vanilla',
    differential_noise='vanilla_noise', dgvit_noise='vanilla_noise')
interactions = dict(differential_noise='differential', dgvit_noise='dgvit')  # does noise change the difference?
seeds = [0, 1, 2, 3, 4]
metric = 'accuracy/top1'
options = {'default_hooks.logger.interval': 23}
budgets = dict(
    short=dict({
        'train_cfg.max_epochs': 20,
        'train_cfg.val_interval': 10,
        'param_scheduler.1.end': 20,
        'param_scheduler.1.T_max': 20}))
