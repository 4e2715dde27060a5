"""Settings that train in a second."""

SETTINGS = {"data": "digits", "lot": 32, "lr": 0.5, "momentum": 0.0, "accountant": "rdp"}
