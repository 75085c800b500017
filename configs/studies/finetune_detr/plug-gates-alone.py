_base_ = 'plug.py'
model = dict(train='gates')
