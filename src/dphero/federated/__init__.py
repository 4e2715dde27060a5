"""Federated training: clients train with privacy on their own data, a server averages what they send.

The way through the modules: ``settings`` (what a federation is), ``partitions`` (who holds which examples in a
simulation), ``requests``, ``client``, ``local_training`` and ``client_files`` (one client: its rounds, its budget, its
ledger on disk), ``sharing``, ``generator`` and ``shared_set`` (FedFed's shared data set), ``rounds``, ``updates``,
``strategies`` and ``client_level`` (whom the server asks, what it rejects, how it averages), ``server`` (rounds,
evaluation, checkpoints), ``directory`` (its files), ``statement`` (what is promised to whom), ``client_app``,
``simulation`` and ``deployment`` (the same as a Flower app, on one machine and on many).

Needs ``pip install 'dphero[federated]'``; ``settings``, ``partitions`` and ``client`` do without Flower.
"""
