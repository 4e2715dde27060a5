"""``python -m dphero.cli`` is ``dphero``."""

from dphero.cli import app

app(prog_name="dphero")
