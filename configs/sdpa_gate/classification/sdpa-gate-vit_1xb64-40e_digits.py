_base_ = '../../vanilla/classification/vit_1xb64-40e_digits.py'
# The study is of language models; the class token of a ViT is its first token.
model = dict(
    type='mmgate.Gated',
    host='mmpretrain.ImageClassifier',
    attention=dict(
        path='backbone.layers.*.attn', type='SDPAGatedMultiheadAttention'))
