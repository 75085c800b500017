_base_ = '../../vanilla/classification/t2t-vit-10_8xb128-300e_in1k.py'

# In the transformer behind the tokens-to-token module, whose attentions add their values: no gate replaces those.
model = dict(
    type='mmgate.Gated',
    host='mmpretrain.ImageClassifier',
    attention=dict(path='backbone.encoder.*.attn', type='PLuGMultiheadAttention'))
