"""Where Gaussian noise comes from. Where it is added, and priced, is `dphero.mechanism.release`.

Two sources share one interface, `NoiseSource`:

* `FastNoise`: an AES-128 key stream on the CPU, torch's Philox on CUDA, under a secret key. Noise is a function of
  (key, release, name of the tensor, place in it), so a resumed run continues exactly where the saved one stopped. The
  key is saved.
* `SecureNoise`: an AES-256 key stream, turned into Gaussians in float64. The key is never saved.

Both refuse to serve one release twice: two sums under the same noise differ by exactly the people in them.
A source of the user's own goes through `OwnNoise`, which checks what can be seen of its promise.
"""

from dphero.noise.fast import FastNoise
from dphero.noise.own import OwnNoise
from dphero.noise.secure import SecureNoise
from dphero.noise.source import NoiseSource

__all__ = ["FastNoise", "NoiseSource", "OwnNoise", "SecureNoise"]
