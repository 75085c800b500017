_base_ = '../../vanilla/classification/xcit-t12_8xb128-300e_in1k.py'

# In the cross-covariance attentions; the class attentions after them stay vanilla.
model = dict(
    type='mmgate.Gated',
    host='mmpretrain.ImageClassifier',
    attention=dict(path='backbone.**', type='PLuGMultiheadAttention'))
