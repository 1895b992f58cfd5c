"""What operators do to memory while a call of the loop runs for the first time."""

from typing import Any

from torch.multiprocessing.reductions import StorageWeakRef

from graphfsdp.base.op_tensors import OpCall, OperatorMode, storage_key


class Watch(OperatorMode):
    """The storages that operators write, whether or not a version tells of it, and make."""

    joins = True

    def __init__(self) -> None:
        super().__init__()
        self.written: set[int] = set()
        self.made: dict[int, StorageWeakRef] = {}  # while it is held, its number is not used again

    def on_op(self, call: OpCall) -> Any:
        self.written.update(map(storage_key, call.written))
        result = call.run()
        for tensor, key in call.made(result):
            self.made[key] = StorageWeakRef(tensor.untyped_storage())
        return result
