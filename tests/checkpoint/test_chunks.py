"""What is handed to DCP to be written."""

import pytest
import torch

from lightning_replica.checkpoint.chunks import Chunk, _SavePlanner


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_view_is_written_from_where_it_lies(dtype: torch.dtype) -> None:
    """DCP would clone it, and keep the clones of all chunks until its file is closed."""
    part = torch.arange(100).to(dtype)[20:50]
    chunk = Chunk("weight", 100, 20, part)
    given = _SavePlanner([chunk]).lookup_object(chunk.index)
    assert torch.equal(given, part)
    assert given.data_ptr() == part.data_ptr()
    assert given.untyped_storage().nbytes() == part.nbytes < part.untyped_storage().nbytes()
