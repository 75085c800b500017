# From the start of DeiT's linear layers, as its partner does: the identity start would undo what this tests.
_base_ = 'plug-deit-t-paper-init_8xb128-300e_in1k.py'
# Table 4
model = dict(attention=dict(gml='none'))
