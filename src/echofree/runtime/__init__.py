"""An exported canceller at work. Needs numpy and one engine (onnxruntime, ai-edge-litert ...), and neither torch nor
the rest of EchoFree: this folder and `errors.py` are all that a device has to carry.

    canceller = Canceller.load("export/onnx")
    out = canceller.process(mic, far)  # chunks of any size, float or int16
"""

from echofree.runtime.canceller import Canceller as Canceller
