"""Whiten and colour: the linear maps that shape clipping and noise."""
