_base_ = 'vanilla/vitae-t_4xb128-300e_in1k.py'

# In the normal cells; the reduction cells' Performer attentions have no logits.
model = dict(
    type='mmgate.Gated',
    host='mmpretrain.ImageClassifier',
    attention=dict(path='backbone.**', type='PLuGMultiheadAttention'))
