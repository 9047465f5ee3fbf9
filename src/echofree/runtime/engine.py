"""The engines that run a graph, one step at a time, each on one core.

A `Runner` is one stream: it owns the states and feeds them back. Runners of one engine share nothing but the weights.
All buffers are made once; two sets of states take turns as input and output.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from echofree.errors import EchoFreeError, MissingExtra, UserError
from echofree.runtime.contract import Contract

TENSORRT_REMEDY = (
    "Install TensorRT as its vendor says for your GPU, and the package cuda-python; they're too large and too tied to "
    "the machine to be an extra of EchoFree"
)


class Runner(Protocol):
    """One stream through a graph.

    Attributes:
        inputs: arrays to fill before `run`, in the contract's order.
    """

    inputs: list[np.ndarray]

    def run(self) -> np.ndarray:
        """-> the output, valid until the next call."""

    def reset(self) -> None:
        """Fresh states."""

    def states(self) -> dict[str, np.ndarray]:
        """The present states by name."""

    def load_states(self, states: dict[str, np.ndarray]) -> None:
        """Goes on from these."""


def open_engine(contract: Contract, folder: Path) -> Callable[[], Runner]:
    """Loads the graph once. -> a function that makes a runner, a stream each

    Raises:
        MissingExtra: the engine isn't installed.
        EchoFreeError: it can't read the file.
    """
    makers: dict[str, Callable[[Contract, Path], Callable[[], Runner]]] = {
        "onnxruntime": _open_onnx,
        "litert": _open_litert,
        "executorch": _open_executorch,
        "tensorrt": _open_tensorrt,
    }
    if contract.engine not in makers:
        raise EchoFreeError(f"{folder}: no engine {contract.engine!r} in this version. Engines: {', '.join(makers)}")
    return makers[contract.engine](contract, folder)


def fresh_states(contract: Contract, folder: Path | None) -> list[np.ndarray]:
    """The states of a new stream, in the contract's order."""
    if contract.initial and folder is not None:
        with np.load(folder / contract.initial) as stored:
            return [np.ascontiguousarray(stored[state.name], np.float32) for state in contract.states]
    return [np.zeros(state.shape, np.float32) for state in contract.states]


class _Buffers:
    """Arrays of one stream: inputs, output, and two sets of states that take turns."""

    def __init__(self, contract: Contract, folder: Path):
        self.names = [state.name for state in contract.states]
        self.first = fresh_states(contract, folder)
        self.sets = [[value.copy() for value in self.first] for _ in range(2)]
        self.now = 0
        self.inputs = [np.zeros(shape, np.float32) for shape in contract.inputs.values()]
        self.output = np.zeros(contract.output_shape, np.float32)

    def reset(self) -> None:
        for old, first in zip(self.sets[self.now], self.first):
            old[:] = first

    def states(self) -> dict[str, np.ndarray]:
        return dict(zip(self.names, self.sets[self.now]))

    def load_states(self, states: dict[str, np.ndarray]) -> None:
        for name, old in zip(self.names, self.sets[self.now]):
            old[:] = states[name]


def _open_onnx(contract: Contract, folder: Path) -> Callable[[], Runner]:
    try:
        import onnxruntime as ort
    except ImportError:
        raise MissingExtra("onnxruntime", "export", f"running {folder}") from None
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        session = ort.InferenceSession(str(folder / contract.file), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its exceptions have no common base of their own
        raise EchoFreeError(f"{folder / contract.file}: onnxruntime can't load it ({error})") from error
    return lambda: _OnnxRunner(session, contract, folder)


class _OnnxRunner(_Buffers):
    def __init__(self, session: Any, contract: Contract, folder: Path):
        super().__init__(contract, folder)
        self._session, self._bindings = session, []
        for now in range(2):
            binding = session.io_binding()
            for name, array in zip(contract.inputs, self.inputs):
                self._bind(binding.bind_input, name, array)
            self._bind(binding.bind_output, contract.output, self.output)
            for state, old, new in zip(contract.states, self.sets[now], self.sets[1 - now]):
                self._bind(binding.bind_input, state.input, old)
                self._bind(binding.bind_output, state.output, new)
            self._bindings.append(binding)

    @staticmethod
    def _bind(bind: Callable[..., None], name: str, array: np.ndarray) -> None:
        bind(name, "cpu", 0, np.float32, array.shape, array.ctypes.data)

    def run(self) -> np.ndarray:
        self._session.run_with_iobinding(self._bindings[self.now])
        self.now = 1 - self.now
        return self.output


def _open_litert(contract: Contract, folder: Path) -> Callable[[], Runner]:
    try:
        interpreter = importlib.import_module("ai_edge_litert.interpreter").Interpreter
    except ImportError:
        raise MissingExtra("ai_edge_litert", "litert", f"running {folder}") from None
    path = str(folder / contract.file)
    return lambda: _LiteRtRunner(interpreter(model_path=path, num_threads=1), contract, folder)


class _LiteRtRunner(_Buffers):
    """A converter of PyTorch models names tensors by their position: args_0 ..., output_0 ..."""

    def __init__(self, interpreter: Any, contract: Contract, folder: Path):
        super().__init__(contract, folder)
        self._interpreter = interpreter
        interpreter.allocate_tensors()
        signature = interpreter.get_signature_runner()
        given, made = signature.get_input_details(), signature.get_output_details()
        num, count = len(contract.inputs), len(contract.states)
        if len(given) != num + count or len(made) != 1 + count:
            raise EchoFreeError(f"{folder}: the file has {len(given)} inputs and {len(made)} outputs, not as described")
        indices = [given[f"args_{i}"]["index"] for i in range(num + count)]
        self._inputs, self._given = indices[:num], indices[num:]
        self._output, *self._made = (made[f"output_{i}"]["index"] for i in range(1 + count))

    def run(self) -> np.ndarray:
        it = self._interpreter
        for index, array in zip(self._inputs, self.inputs):
            it.set_tensor(index, array)
        for index, array in zip(self._given, self.sets[0]):
            it.set_tensor(index, array)
        it.invoke()
        for index, array in zip(self._made, self.sets[0]):
            array[:] = it.get_tensor(index)
        self.output[:] = it.get_tensor(self._output)
        return self.output


def _open_executorch(contract: Contract, folder: Path) -> Callable[[], Runner]:
    try:
        import torch  # its Python binding hands out torch tensors; its C++ runtime needs none

        runtime = importlib.import_module("executorch.runtime").Runtime
    except ImportError:
        raise MissingExtra("executorch", "executorch", f"running {folder}") from None
    method = runtime.get().load_program(folder / contract.file).load_method("forward")
    return lambda: _ExecutorchRunner(method, torch, contract, folder)


class _ExecutorchRunner(_Buffers):
    def __init__(self, method: Any, torch: Any, contract: Contract, folder: Path):
        super().__init__(contract, folder)
        self._method = method
        self._tensors = [torch.from_numpy(array) for array in (*self.inputs, *self.sets[0])]  # the same memory

    def run(self) -> np.ndarray:
        made = self._method.execute(self._tensors)
        self.output[:] = made[0].numpy()
        for array, tensor in zip(self.sets[0], made[1:]):
            array[:] = tensor.numpy()
        return self.output


def _open_tensorrt(contract: Contract, folder: Path) -> Callable[[], Runner]:
    try:
        tensorrt = importlib.import_module("tensorrt")
        cuda = importlib.import_module("cuda.bindings.runtime")
    except ImportError as error:
        raise UserError(f"running {folder} needs {error.name}. {TENSORRT_REMEDY}") from None
    logger = tensorrt.Logger(tensorrt.Logger.ERROR)
    engine = tensorrt.Runtime(logger).deserialize_cuda_engine((folder / contract.file).read_bytes())
    if engine is None:
        raise EchoFreeError(
            f"{folder / contract.file}: TensorRT {tensorrt.__version__} can't load it on this GPU. An engine fits the "
            "version and the GPU that it was built with: export it here"
        )
    return lambda: _TensorRtRunner(engine, cuda, contract, folder)


class _TensorRtRunner(_Buffers):
    """Device memory for every tensor; states stay there and swap their roles."""

    def __init__(self, engine: Any, cuda: Any, contract: Contract, folder: Path):
        super().__init__(contract, folder)
        self._cuda, self._context, self._contract = cuda, engine.create_execution_context(), contract
        self._stream = self._done(cuda.cudaStreamCreate())
        arrays = [*self.inputs, self.output, *self.sets[0], *self.sets[1]]
        self._memory = [self._done(cuda.cudaMalloc(array.nbytes)) for array in arrays]
        num, count = len(self.inputs), len(self.names)
        self._in, self._out = self._memory[:num], self._memory[num]
        rest = self._memory[num + 1 :]
        self._device_sets = [rest[:count], rest[count:]]
        for name, pointer in zip(contract.inputs, self._in):
            self._context.set_tensor_address(name, int(pointer))
        self._context.set_tensor_address(contract.output, int(self._out))
        self.reset()

    def _done(self, result: Any) -> Any:
        error, *values = result
        if int(error) != 0:
            raise EchoFreeError(f"CUDA failed with error {int(error)} while running an engine of TensorRT")
        return values[0] if values else None

    def _copy(self, to: int, start: int, size: int, kind: str) -> None:
        self._done(self._cuda.cudaMemcpy(to, start, size, getattr(self._cuda.cudaMemcpyKind, f"cudaMemcpy{kind}")))

    def reset(self) -> None:
        super().reset()
        for array, pointer in zip(self.sets[self.now], self._device_sets[self.now]):
            self._copy(int(pointer), array.ctypes.data, array.nbytes, "HostToDevice")

    def load_states(self, states: dict[str, np.ndarray]) -> None:
        super().load_states(states)
        for array, pointer in zip(self.sets[self.now], self._device_sets[self.now]):
            self._copy(int(pointer), array.ctypes.data, array.nbytes, "HostToDevice")

    def states(self) -> dict[str, np.ndarray]:
        for array, pointer in zip(self.sets[self.now], self._device_sets[self.now]):
            self._copy(array.ctypes.data, int(pointer), array.nbytes, "DeviceToHost")
        return super().states()

    def run(self) -> np.ndarray:
        for array, pointer in zip(self.inputs, self._in):
            self._copy(int(pointer), array.ctypes.data, array.nbytes, "HostToDevice")
        old, new = self._device_sets[self.now], self._device_sets[1 - self.now]
        for state, before, after in zip(self._contract.states, old, new):
            self._context.set_tensor_address(state.input, int(before))
            self._context.set_tensor_address(state.output, int(after))
        if not self._context.execute_async_v3(int(self._stream)):
            raise EchoFreeError("TensorRT refused to run the engine")
        self._done(self._cuda.cudaStreamSynchronize(self._stream))
        self._copy(self.output.ctypes.data, int(self._out), self.output.nbytes, "DeviceToHost")
        self.now = 1 - self.now
        return self.output
