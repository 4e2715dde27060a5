"""Federated training: clients train with privacy on their own data, a server averages what they send.

The way through the rooms: ``settings`` (what a federation is), ``partitions`` (who holds which examples in a
simulation), ``requests`` and ``updates`` (what travels), ``client`` (its rounds, its budget, its ledger on disk),
``sharing`` (FedFed's shared data set), ``server`` (whom it asks, what it rejects, how it averages, what is promised to
whom), ``directory`` (its files), ``simulation`` and ``deployment`` (the same Flower app, on one machine and on many).

Needs ``pip install 'dphero[federated]'``; ``settings``, ``partitions`` and ``client.training_round`` do without Flower.
"""
