"""tierload in transformers' ``Trainer``: commits where it would write ``checkpoint-N/``, and resuming from them.

    trainer = Trainer(model=model, args=args, train_dataset=data, callbacks=[TierloadCallback("runs/x")])
    tierload.hooks.transformers.resume(trainer)      # trains, from the newest commit if there is one

or, where ``trainer.train(resume_from_checkpoint=True)`` is to stay as it is::

    class MyTrainer(TierloadMixin, Trainer): ...
"""

from tierload.hooks.transformers.exporting import export
from tierload.hooks.transformers.trainer import TierloadCallback, TierloadMixin, resume

__all__ = ["TierloadCallback", "TierloadMixin", "export", "resume"]
