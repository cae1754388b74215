"""Weight initializers: functions of a parameter's name and array that fill the array in place."""

from fastopt.initializer.base import Initializer as Initializer
from fastopt.initializer.constants import Bilinear as Bilinear
from fastopt.initializer.constants import Constant as Constant
from fastopt.initializer.constants import One as One
from fastopt.initializer.constants import Zero as Zero
from fastopt.initializer.distributions import Normal as Normal
from fastopt.initializer.distributions import Orthogonal as Orthogonal
from fastopt.initializer.distributions import TruncatedNormal as TruncatedNormal
from fastopt.initializer.distributions import Uniform as Uniform
from fastopt.initializer.fans import MSRAPrelu as MSRAPrelu
from fastopt.initializer.fans import Xavier as Xavier
from fastopt.initializer.gains import GlorotNormal as GlorotNormal
from fastopt.initializer.gains import GlorotUniform as GlorotUniform
from fastopt.initializer.gains import HeNormal as HeNormal
from fastopt.initializer.gains import HeUniform as HeUniform
from fastopt.initializer.gains import LecunNormal as LecunNormal
from fastopt.initializer.gains import LecunUniform as LecunUniform
from fastopt.initializer.load import Load as Load
from fastopt.initializer.mixed import Mixed as Mixed
from fastopt.initializer.names import InitDesc as InitDesc
from fastopt.initializer.registry import alias as alias
from fastopt.initializer.registry import create as create
from fastopt.initializer.registry import register as register
from fastopt.initializer.rnn import FusedRNN as FusedRNN
from fastopt.initializer.rnn import LSTMBias as LSTMBias
from fastopt.initializer.text import initializer_registry as initializer_registry
