"""Tiny randomly initialised models of every family of `torchvision.models`: whole where that is small, else of its own parts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision import models
from torchvision.extension import _has_ops
from torchvision.models import (
    convnext,
    detection,
    efficientnet,
    regnet,
    resnet,
    segmentation,
    swin_transformer,
    vgg,
    video,
)
from torchvision.models import optical_flow as flow
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.models.detection import anchor_utils, backbone_utils, ssd
from torchvision.models.video import mvit
from torchvision.models.video import swin_transformer as swin3d

from zoo_batches import Batch, randn
from zoo_models import Tiny
from zoo_trained import CLASSES, Loss, builder, classified, labelled

SIDE = 64
Make = Callable[[], nn.Module]
new: dict[str, Any] = {"num_classes": CLASSES}


def small_head(model: Any, inputs: int) -> nn.Module:
    """The model with a classifier of 32 channels in the place of one of thousands."""
    model.classifier = nn.Sequential(
        nn.Linear(inputs, 32), nn.ReLU(True), nn.Dropout(), nn.Linear(32, CLASSES)
    )
    return model


def small_vgg(norm: bool) -> nn.Module:
    return small_head(
        models.VGG(vgg.make_layers([8, "M", 16, "M", 16, 16, "M"], batch_norm=norm), **new), 16 * 49
    )


def small_convnext() -> nn.Module:
    sizes = ((16, 32, 1), (32, 48, 1), (48, None, 2))
    return models.ConvNeXt([convnext.CNBlockConfig(*each) for each in sizes], 0.1, **new)


def small_swin(**kwargs: Any) -> nn.Module:
    return models.SwinTransformer([4, 4], 16, [2, 2], [2, 4], [4, 4], **kwargs, **new)


def small_efficientnet(second: bool) -> nn.Module:
    plain = partial(efficientnet.MBConvConfig, width_mult=1.0, depth_mult=1.0)
    first = efficientnet.FusedMBConvConfig if second else plain
    return models.EfficientNet(
        [first(1, 3, 1, 16, 16, 1), first(4, 3, 2, 16, 24, 2), plain(4, 5, 2, 24, 32, 2)],
        dropout=0.2,
        last_channel=64,
        **new,
    )


def small_regnet(squeeze: float | None) -> nn.Module:
    shape = regnet.BlockParams.from_init_params(
        depth=6, w_0=16, w_a=10.0, w_m=2.0, group_width=8, se_ratio=squeeze
    )
    return models.RegNet(
        shape, stem_width=8, norm_layer=partial(nn.BatchNorm2d, eps=1e-5, momentum=0.1), **new
    )


def small_vit() -> nn.Module:
    return models.VisionTransformer(SIDE, 16, 2, 2, 32, 64, dropout=0.1, attention_dropout=0.1, **new)


def small_maxvit() -> nn.Module:
    return models.MaxVit(
        (SIDE, SIDE), stem_channels=16, partition_size=4, block_channels=[16, 32], block_layers=[1, 1], head_dim=8,
        stochastic_depth_prob=0.1, **new,
    )  # fmt: skip


def small_resnet(block: Any = resnet.BasicBlock, **kwargs: Any) -> nn.Module:
    return models.ResNet(block, [1, 1, 1, 1], **kwargs, **new)


def dilated() -> dict[str, Any]:
    stages = [False, True, True]
    return {"block": resnet.Bottleneck, "replace_stride_with_dilation": stages, "width_per_group": 16}


# The name of the smallest builder of each family of classifiers, the side of its images and what makes a small one of its parts.
CLASSIFIERS: dict[str, tuple[int, Make]] = {
    "alexnet": (SIDE, lambda: small_head(models.alexnet(**new), 9216)),
    "convnext_tiny": (SIDE, small_convnext),
    "densenet121": (SIDE, lambda: models.DenseNet(8, (2, 2, 2), 16, drop_rate=0.1, **new)),
    "efficientnet_b0": (SIDE, partial(small_efficientnet, False)),
    "efficientnet_v2_s": (SIDE, partial(small_efficientnet, True)),
    "googlenet": (SIDE, lambda: models.googlenet(init_weights=False, **new)),
    "inception_v3": (96, lambda: models.inception_v3(init_weights=False, aux_logits=False, **new)),
    "maxvit_t": (SIDE, small_maxvit),
    "mnasnet0_5": (SIDE, lambda: models.mnasnet0_5(**new)),
    "mobilenet_v2": (SIDE, lambda: models.mobilenet_v2(width_mult=0.25, **new)),
    "mobilenet_v3_large": (SIDE, lambda: models.mobilenet_v3_large(width_mult=0.25, **new)),
    "mobilenet_v3_small": (SIDE, lambda: models.mobilenet_v3_small(width_mult=0.25, **new)),
    "regnet_x_400mf": (SIDE, partial(small_regnet, None)),
    "regnet_y_400mf": (SIDE, partial(small_regnet, 0.25)),
    "resnet18": (SIDE, small_resnet),
    "resnet50": (SIDE, lambda: small_resnet(resnet.Bottleneck, width_per_group=16)),
    "resnext50_32x4d": (SIDE, lambda: small_resnet(resnet.Bottleneck, groups=8, width_per_group=4)),
    "shufflenet_v2_x0_5": (SIDE, lambda: models.shufflenet_v2_x0_5(**new)),
    "squeezenet1_0": (SIDE, lambda: models.squeezenet1_0(**new)),
    "squeezenet1_1": (SIDE, lambda: models.squeezenet1_1(**new)),
    "swin_t": (SIDE, small_swin),
    "swin_v2_t": (
        SIDE,
        lambda: small_swin(
            block=swin_transformer.SwinTransformerBlockV2, downsample_layer=swin_transformer.PatchMergingV2
        ),
    ),
    "vgg11": (SIDE, partial(small_vgg, False)),
    "vgg11_bn": (SIDE, partial(small_vgg, True)),
    "vit_b_16": (SIDE, small_vit),
    "wide_resnet50_2": (SIDE, lambda: small_resnet(resnet.Bottleneck, width_per_group=32)),
}


def segmented(model: nn.Module, pixels: Tensor, labels: Tensor) -> Tensor:
    found = model(pixels)
    losses = [F.cross_entropy(each, labels, ignore_index=255) for each in found.values()]
    return torch.stack(losses).sum()


def segments(generator: torch.Generator) -> Batch:
    pixels = randn(generator, 4, 3, SIDE, SIDE)
    labels = torch.randint(0, CLASSES, (4, SIDE // 8, SIDE // 8), generator=generator)
    labels[:, 0] = 255
    return {"pixels": pixels, "labels": labels.repeat_interleave(8, 1).repeat_interleave(8, 2)}


def layers_of(model: nn.Module, **names: str) -> nn.Module:
    return IntermediateLayerGetter(model, names)


def small_fcn() -> nn.Module:
    heads = segmentation.fcn.FCNHead(2048, CLASSES), segmentation.fcn.FCNHead(1024, CLASSES)
    return segmentation.FCN(layers_of(small_resnet(**dilated()), layer4="out", layer3="aux"), *heads)


def small_deeplab() -> nn.Module:
    body = layers_of(small_resnet(**dilated()), layer4="out")
    return segmentation.DeepLabV3(body, segmentation.deeplabv3.DeepLabHead(2048, CLASSES, (2, 4)))


def small_lraspp() -> nn.Module:
    body = models.mobilenet_v3_large(width_mult=0.25, dilated=True).features
    low, high = body[4].out_channels, body[16].out_channels
    return segmentation.LRASPP(layers_of(body, **{"4": "low", "16": "high"}), low, high, CLASSES, 32)


SEGMENTERS: dict[str, Make] = {
    "fcn_resnet50": small_fcn,
    "deeplabv3_resnet50": small_deeplab,
    "lraspp_mobilenet_v3_large": small_lraspp,
}


def detected(model: nn.Module, pixels: Tensor, targets: list[Batch]) -> Tensor:
    losses = model(list(pixels), targets)
    return torch.stack(list(losses.values())).sum()


def boxes(generator: torch.Generator) -> Batch:
    """Images with two boxes each, with masks and three points of what is in each."""
    targets: list[Batch] = []
    for _ in range(2):
        corners = torch.randint(0, 24, (2, 2), generator=generator)
        sizes = torch.randint(12, 40, (2, 2), generator=generator)
        masks = torch.zeros(2, SIDE, SIDE, dtype=torch.uint8)
        for mask, (left, top), (width, height) in zip(masks, corners.tolist(), sizes.tolist(), strict=True):
            mask[top : top + height, left : left + width] = 1
        places = corners[:, None] + sizes[:, None] * torch.tensor([0.25, 0.5, 0.75])[:, None]
        targets.append(
            {
                "boxes": torch.cat((corners, corners + sizes), 1).float(),
                "labels": torch.randint(1, CLASSES, (2,), generator=generator),
                "masks": masks,
                "keypoints": torch.cat((places.floor(), torch.ones(2, 3, 1)), 2),
            }
        )
    return {"pixels": randn(generator, 2, 3, SIDE, SIDE), "targets": targets}


def pyramid(channels: int = 16) -> nn.Module:
    getter = backbone_utils.BackboneWithFPN
    return getter(small_resnet(), {"layer2": "0", "layer3": "1", "layer4": "2"}, [128, 256, 512], channels)


def anchors(*sizes: int, ratios: tuple[float, ...] = (0.5, 1.0, 2.0)) -> nn.Module:
    return anchor_utils.AnchorGenerator(tuple((size,) for size in sizes), (ratios,) * len(sizes))


def of_regions(make: Callable[..., nn.Module], **kwargs: Any) -> nn.Module:
    """A detector with proposals of regions, of few of them."""
    return make(
        pyramid(), rpn_anchor_generator=anchors(16, 24, 32, 48), min_size=SIDE, max_size=SIDE, rpn_pre_nms_top_n_train=100,
        rpn_post_nms_top_n_train=30, rpn_batch_size_per_image=32, box_batch_size_per_image=16,
        box_head=detection.faster_rcnn.TwoMLPHead(16 * 49, 32),
        box_predictor=detection.faster_rcnn.FastRCNNPredictor(32, CLASSES), **kwargs,
    )  # fmt: skip


def small_mask_rcnn() -> nn.Module:
    parts = detection.mask_rcnn
    predictor = parts.MaskRCNNPredictor(16, 16, CLASSES)
    return of_regions(
        detection.MaskRCNN, mask_head=parts.MaskRCNNHeads(16, (16, 16), 1), mask_predictor=predictor
    )


def small_keypoint_rcnn() -> nn.Module:
    parts = detection.keypoint_rcnn
    predictor = parts.KeypointRCNNPredictor(16, 3)
    return of_regions(
        detection.KeypointRCNN,
        keypoint_head=parts.KeypointRCNNHeads(16, (16, 16)),
        keypoint_predictor=predictor,
    )


def small_retinanet() -> nn.Module:
    sizes = anchors(16, 24, 32, 48)
    return detection.RetinaNet(pyramid(), CLASSES, min_size=SIDE, max_size=SIDE, anchor_generator=sizes)


def small_fcos() -> nn.Module:
    """With two channels or more in each of its 32 groups, and images twice as large: it normalises maps of few places."""
    sizes = anchors(8, 16, 32, 48, ratios=(1.0,))
    side: dict[str, Any] = {"min_size": 2 * SIDE, "max_size": 2 * SIDE}
    return detection.FCOS(pyramid(64), CLASSES, anchor_generator=sizes, **side)


def small_ssd() -> nn.Module:
    body = layers_of(small_resnet(), layer2="0", layer3="1", layer4="2")
    shapes = anchor_utils.DefaultBoxGenerator([[2]] * 3, scales=[0.2, 0.4, 0.6, 0.8])
    heads = ssd.SSDHead([128, 256, 512], shapes.num_anchors_per_location(), CLASSES)
    return detection.ssd.SSD(body, shapes, (SIDE, SIDE), CLASSES, head=heads)


DETECTORS: dict[str, Make] = {
    "fasterrcnn_resnet50_fpn": partial(of_regions, detection.FasterRCNN),
    "maskrcnn_resnet50_fpn": small_mask_rcnn,
    "keypointrcnn_resnet50_fpn": small_keypoint_rcnn,
    "retinanet_resnet50_fpn": small_retinanet,
    "fcos_resnet50_fpn": small_fcos,
    "ssd300_vgg16": small_ssd,
    "ssdlite320_mobilenet_v3_large": lambda: detection.ssdlite320_mobilenet_v3_large(
        num_classes=CLASSES, weights_backbone=None, trainable_backbone_layers=6
    ),
}


def small_video(conv: Any, stem: Any) -> nn.Module:
    return video.resnet.VideoResNet(video.resnet.BasicBlock, conv, [1, 1, 1, 1], stem, **new)


def small_s3d() -> nn.Module:
    """Pools over 2 x 2 places, where the whole one has 7 x 7."""
    model = models.video.s3d(**new)
    model.avgpool = nn.AvgPool3d(2)
    return model


def small_mvit(second: bool) -> nn.Module:
    kernel = [3, 3, 3]
    settings = [
        mvit.MSBlockConfig(1, 16, 32, kernel, kernel, [1, 1, 1], [1, 2, 2]),
        mvit.MSBlockConfig(2, 32, 32, kernel, kernel, [1, 2, 2], [1, 1, 1]),
    ]
    flags = [second, not second, second, second]
    return video.MViT((32, 32), 8, settings, *flags, stochastic_depth_prob=0.1, **new)


def small_swin3d() -> nn.Module:
    parts = {
        "block": partial(swin_transformer.SwinTransformerBlock, attn_layer=swin3d.ShiftedWindowAttention3d)
    }
    return swin3d.SwinTransformer3d([2, 4, 4], 16, [2, 2], [2, 4], [4, 4, 4], **parts, **new)


R, FILM = video.resnet, (3, 8, 32, 32)
FILMS: dict[str, tuple[tuple[int, ...], Make]] = {
    "r3d_18": (FILM, partial(small_video, [R.Conv3DSimple] * 4, R.BasicStem)),
    "mc3_18": (FILM, partial(small_video, [R.Conv3DSimple, *[R.Conv3DNoTemporal] * 3], R.BasicStem)),
    "r2plus1d_18": (FILM, partial(small_video, [R.Conv2Plus1D] * 4, R.R2Plus1dStem)),
    "s3d": ((3, 16, SIDE, SIDE), small_s3d),
    "mvit_v1_b": (FILM, partial(small_mvit, False)),
    "mvit_v2_s": (FILM, partial(small_mvit, True)),
    "swin3d_t": (FILM, small_swin3d),
}


def flowed(model: nn.Module, first: Tensor, second: Tensor, flow: Tensor) -> Tensor:
    return torch.stack(
        [(found - flow).abs().mean() for found in model(first, second, num_flow_updates=2)]
    ).sum()


def pairs(generator: torch.Generator) -> Batch:
    first, second = (randn(generator, 1, 3, 128, 128) for _ in range(2))
    return {"first": first, "second": second, "flow": randn(generator, 1, 2, 128, 128)}


def of(family: str, name: str, make: Make, loss: Loss, batch: Callable[[torch.Generator], Batch]) -> Tiny:
    return Tiny(f"{family}/{name}", family, builder(make, loss, batch))


def tiny_models() -> list[Tiny]:
    """Return them; detectors by regions where torchvision's own operators load: its wheels for CUDA load none without CUDA."""
    result: list[Tiny] = []
    for name, (side, make) in CLASSIFIERS.items():
        result.append(of("torchvision_classification", name, make, classified, labelled(3, side, side)))
    for name, make in SEGMENTERS.items():
        result.append(of("torchvision_segmentation", name, make, segmented, segments))
    for name, make in DETECTORS.items():
        if "rcnn" in name and not _has_ops():
            continue
        result.append(of("torchvision_detection", name, make, detected, boxes))
    for name, (shape, make) in FILMS.items():
        result.append(of("torchvision_video", name, make, classified, labelled(*shape)))
    for name, make in (("raft_small", flow.raft_small), ("raft_large", flow.raft_large)):
        result.append(of("torchvision_flow", name, make, flowed, pairs))
    return result
