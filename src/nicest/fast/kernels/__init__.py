"""GPU kernels, in Triton: each makes one pass over memory where stock kernels would make several.

Imported only where there is a GPU. What each computes is written beside it in torch, where it is called.
"""

from nicest.fast.kernels.convolutions import *  # noqa: F403
from nicest.fast.kernels.couplings import *  # noqa: F403
from nicest.fast.kernels.mixing import *  # noqa: F403
from nicest.fast.kernels.optimisers import *  # noqa: F403
from nicest.fast.kernels.splines import *  # noqa: F403
