"""Where captioned images come from."""

from __future__ import annotations

from assay.data.captioned import Captioned
from assay.data.folders import from_folder
from assay.data.hugging_face import from_hugging_face
from assay.data.openmoji import openmoji
from assay.data.shapes import synthetic
from assay.data.stored import save, saved
from assay.data.tars import from_tar

__all__ = ["Captioned", "from_folder", "from_hugging_face", "from_tar", "openmoji", "save", "saved", "synthetic"]
