# mmdet's, with the drop path of agent attention's recipe.
_base_ = 'mmdet::pvt/retinanet_pvt-m_fpn_1x_coco.py'

model = dict(backbone=dict(drop_path_rate=0.2))
