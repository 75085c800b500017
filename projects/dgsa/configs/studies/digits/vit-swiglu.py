_base_ = '../../dgvit_1xb64-40e_digits.py'
# The vanilla attention; after SwiGLU there are as many hidden channels as in the ViT
model = dict(backbone=dict(attention=None, expansion=8))
