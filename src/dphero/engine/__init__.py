"""The privacy engine: what users call. It puts the parts together; there is no mathematics here."""

from dphero.engine.privacy_engine import PrivacyEngine

__all__ = ["PrivacyEngine"]
