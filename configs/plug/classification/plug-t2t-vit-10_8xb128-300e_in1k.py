_base_ = '../../vanilla/classification/t2t-vit-10_8xb128-300e_in1k.py'

# In the transformer after the tokens-to-token module. That module's attentions add their values, so that no gate fits them.
model = dict(
    type='mmgate.Gated',
    host='mmpretrain.ImageClassifier',
    attention=dict(path='backbone.encoder.*.attn', type='PLuGMultiheadAttention'))
