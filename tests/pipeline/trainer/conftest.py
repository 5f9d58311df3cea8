"""One torch thread: models this small only lose time to a second one, above all on a busy machine."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
