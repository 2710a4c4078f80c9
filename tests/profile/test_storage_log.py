"""How storages are numbered, from the call that they came with to the one before which they were gone."""

import torch

from recollect._profile.storage_log import StorageLog


def test_one_that_was_resized_and_is_then_said_to_have_been_there_before_did_not_go_before_it_came() -> None:
    log, tensor = StorageLog(), torch.zeros(8)
    number = log.number(tensor.untyped_storage(), tensor.device, 7)
    tensor.untyped_storage().resize_(4)
    (later,) = log.include(tensor)
    assert log.entries[number].freed_at == log.entries[later].made_at == 7
