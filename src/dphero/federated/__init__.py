"""Federated training: clients train with privacy on their own data, a server averages what they send.

The way through the modules: ``settings`` (what a federation is), ``partitions`` (who holds which examples in a
simulation), ``requests``, ``client``, ``local_training`` and ``client_files`` (one client: its rounds, its budget, its
ledger on disk), ``rounds``, ``updates``, ``strategies`` and ``client_level`` (whom the server asks, what it rejects,
how it averages), ``server`` (rounds, evaluation, checkpoints), ``statement`` (what is promised to whom), ``client_app``
and ``simulation`` (the same as a Flower app).

Needs ``pip install 'dphero[federated]'``; ``settings``, ``partitions`` and ``client`` do without Flower.
"""
