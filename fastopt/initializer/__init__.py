"""Weight initializers: callables that fill an array in place, given its parameter's name."""

from typing import Any

from fastopt._advice import Advice as _Advice
from fastopt._advice import no_attribute as _no_attribute
from fastopt.initializer.base import InitDesc as InitDesc
from fastopt.initializer.base import Initializer as Initializer
from fastopt.initializer.base import alias as alias
from fastopt.initializer.base import create as create
from fastopt.initializer.base import initializer_registry as initializer_registry
from fastopt.initializer.base import register as register
from fastopt.initializer.constants import Bilinear as Bilinear
from fastopt.initializer.constants import Constant as Constant
from fastopt.initializer.constants import One as One
from fastopt.initializer.constants import Zero as Zero
from fastopt.initializer.distributions import GlorotNormal as GlorotNormal
from fastopt.initializer.distributions import GlorotUniform as GlorotUniform
from fastopt.initializer.distributions import HeNormal as HeNormal
from fastopt.initializer.distributions import HeUniform as HeUniform
from fastopt.initializer.distributions import LecunNormal as LecunNormal
from fastopt.initializer.distributions import LecunUniform as LecunUniform
from fastopt.initializer.distributions import MSRAPrelu as MSRAPrelu
from fastopt.initializer.distributions import Normal as Normal
from fastopt.initializer.distributions import Orthogonal as Orthogonal
from fastopt.initializer.distributions import TruncatedNormal as TruncatedNormal
from fastopt.initializer.distributions import Uniform as Uniform
from fastopt.initializer.distributions import Xavier as Xavier
from fastopt.initializer.draws import seed as seed
from fastopt.initializer.load import Load as Load
from fastopt.initializer.load import Mixed as Mixed
from fastopt.initializer.rnn import FusedRNN as FusedRNN
from fastopt.initializer.rnn import LSTMBias as LSTMBias


def __getattr__(name: str) -> Any:
    classes = {kind.__name__: kind for kind in initializer_registry.values()}
    meant = initializer_registry.get(_Advice("INITIALIZERS").get(name.lower(), ""))
    advice = {name: f"did you mean {meant.__name__}?"} if meant else {}
    raise _no_attribute(f"module {__name__!r}", name, classes, advice)
