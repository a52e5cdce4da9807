"""Training scripts as people write them at the top level, run as they are, cell by cell, or from standard input.

``saving`` is "save" or "async_save", ``path`` a store.
"""

from __future__ import annotations

CELLS = (
    """
import torch
import tierload
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(200, 200), torch.nn.BatchNorm1d(200), torch.nn.Linear(200, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
_ = tierload.guard(optimizer)
""",
    """
class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.full((200,), index / 40), torch.tensor(index % 10)
""",
    """
loader = torch.utils.data.DataLoader(Squares(), batch_size=8, num_workers=workers, shuffle=True)
step = 0
handle = None
""",
    *[
        """
for x, y in loader:
    step += 1
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    handle = getattr(tierload, saving)({"model": model, "optimizer": optimizer, "step": step}, path, step=step)
"""
    ]
    * 3,
    "handle",
    """
if saving == "async_save":
    _ = handle.result()
""",
)
