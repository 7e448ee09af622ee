"""What a selection keeps of dense attention: overlap, attention mass, output error; and what the layers of a model selected.

`record(model)` keeps ids and scores of every sparse layer while it is open; `save_ids` writes them for `m3attn bench --ids`.
"""

from m3attn.analysis.ids_file import RecordedStep, load_ids, save_ids
from m3attn.analysis.measures import attention_mass, output_error, overlap
from m3attn.analysis.record import Recording, Selection, record

__all__ = ["RecordedStep", "Recording", "Selection", "attention_mass", "load_ids", "output_error", "overlap", "record", "save_ids"]
