"""`extproc demo`: the main job on a real Envoy, in a minute.

Two runs over the same requests: the founding rule and `round_robin`, each on four fresh fake pods
behind Envoy and the picker, all of them real processes on free ports of the loopback interface.
"""

from extproc.demo.story import run_demo

__all__ = ["run_demo"]
