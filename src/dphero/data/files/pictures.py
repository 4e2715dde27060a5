"""Image files as grey or RGB: the same for images that are trained on and for those that a model is shown later."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image


ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp")
"""How the names of image files end."""

_GREY, _COLOUR = ("1", "L", "LA"), ("RGB", "RGBA", "P", "PA", "CMYK", "YCbCr")


def grey_or_rgb(path: Path) -> Image:
    """Return an image file's pixels, of mode L if it is grey and RGB otherwise.

    What lies behind transparent parts is not in the file, so such an image has no pixels of its own.

    Raises:
        ImportError: If pillow is not installed.
        ValueError: If the file is no image, has other than 8 bits for each colour, or transparent parts.
    """
    try:
        from PIL import Image
    except ModuleNotFoundError as error:
        raise ImportError("image files need pillow: pip install 'dphero[experiments]'") from error
    try:
        with Image.open(path) as image:
            image.load()
            if image.mode not in (*_GREY, *_COLOUR):
                raise ValueError(f"its pixels have mode {image.mode}; save it as 8-bit grey or RGB")
            if image.has_transparency_data and image.convert("RGBA").getchannel("A").getextrema() != (255, 255):
                raise ValueError("it has transparent parts; put it on a background, and save it as 8-bit grey or RGB")
            return image.convert("L" if image.mode in _GREY else "RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"{path} cannot be read as an image: {error}") from error
