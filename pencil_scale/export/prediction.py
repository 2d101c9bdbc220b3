"""Prediction: what a trained network says of samples that have no usable label.

predictor = Predictor.load("resnet50", 14, "s3://lake/models/night-12.pt", config.images)
logits, readable = predictor.predict(catalogue, places)          # float32 [B, C], bool [B]
"""

from functools import lru_cache

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor, nn

from pencil_scale.catalogue.catalogue import Catalogue
from pencil_scale.catalogue.ranges import RangeReader
from pencil_scale.config.settings import Images
from pencil_scale.images.augment import ImageSizeError, Recipe, centre
from pencil_scale.images.decode import UndecodableError, decode
from pencil_scale.method.backbones import build_backbone

BATCH = 64


class Predictor:
    """A network in evaluation, on the GPU where this process was given one."""

    def __init__(self, model: nn.Module, num_classes: int, images: Images) -> None:
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model = model.to(self._device).eval()
        self._num_classes = num_classes
        self._resize, self._recipe = images.resize, Recipe.from_config(images)

    @staticmethod
    @lru_cache(maxsize=1)
    def load(backbone: str, num_classes: int, weights: str, images: Images) -> "Predictor":
        """Build the network and load what a run published; once in every process."""
        return Predictor(build_backbone(backbone, num_classes, weights), num_classes, images)

    def predict(
        self, catalogue: Catalogue, places: pa.Table
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
        """Give class logits, and which images could be read; of the others the logits are zeros."""
        logits = np.zeros((len(places), self._num_classes), np.float32)
        readable = np.zeros(len(places), np.bool_)
        for first in range(0, len(places), BATCH):
            images = [self._image(data) for data in _read(catalogue, places.slice(first, BATCH))]
            good = [number for number, image in enumerate(images) if image is not None]
            if good:
                rows = first + np.array(good)
                logits[rows] = self._forward([image for image in images if image is not None])
                readable[rows] = True
        return logits, readable

    @torch.no_grad()
    def _forward(self, images: list[Tensor]) -> npt.NDArray[np.float32]:
        found: npt.NDArray[np.float32] = (
            self._model(torch.stack(images).to(self._device)).float().cpu().numpy()
        )
        return found

    def _image(self, data: bytes) -> Tensor | None:
        """The middle of one image, as evaluation sees it; None where there is nothing to see."""
        try:
            pixels = torch.from_numpy(decode(data, self._resize).copy())
            return centre(pixels.permute(2, 0, 1)[None], self._recipe)[0]
        except (UndecodableError, ImageSizeError):
            return None


def _read(catalogue: Catalogue, places: pa.Table) -> list[bytes]:
    columns = [places[name].to_numpy() for name in ("shard", "image_offset", "image_bytes")]
    return RangeReader(catalogue.shards).read(*columns)
