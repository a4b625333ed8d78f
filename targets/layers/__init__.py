"""What layers of models do differently: positions (`rotary`, `distances`), what they weigh by place (`own_masks`,
`documents`), the states that enter them (`runs`), and the output layer (`output_use`, `target_output`).
"""
