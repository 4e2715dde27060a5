"""How layers report what they see while the user's own loop runs. Nothing here knows of clipping or noise."""
