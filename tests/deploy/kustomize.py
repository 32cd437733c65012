"""What `kubectl apply -k FOLDER` would send, for the part of kustomize that deploy/kuberay uses.

Resources, components and `images`. Anything else is refused, and so is what kustomize itself refuses: unknown fields,
files outside of the folder, two resources of one kind and name, a component among resources.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.manifests import Document, read_all

FILE = "kustomization.yaml"
KINDS = {
    "Kustomization": ("kustomize.config.k8s.io/v1beta1", {"resources", "components", "images"}),
    "Component": ("kustomize.config.k8s.io/v1alpha1", {"images"}),
}
LISTS_OF_CONTAINERS = ("containers", "initContainers")


class KustomizeError(ValueError):
    """What kustomize would refuse, or what this reader does not know."""


def rendered(folder: Path) -> list[Document]:
    """The resources of a kustomization, with the images that its components set."""
    told = read(folder, "Kustomization")
    documents = [document for name in told.get("resources", ()) for document in _resources(folder, name)]
    keys = [(document["kind"], document["metadata"]["name"]) for document in documents]
    if twice := sorted({key for key in keys if keys.count(key) > 1}):
        raise KustomizeError(f"{folder.name}: twice {twice[0]}")
    images = [image for name in told.get("components", ()) for image in read(folder / name, "Component")["images"]]
    for image in [*images, *told.get("images", ())]:
        if not set(image) <= {"name", "newName", "newTag", "digest"}:
            raise KustomizeError(f"{folder.name}: unknown field of an image in {image}")
        for container in containers_in(documents):
            container["image"] = _renamed(container["image"], image)
    return documents


def read(folder: Path, kind: str) -> Document:
    """The file of a folder, which must be of this kind."""
    told = yaml.safe_load((folder / FILE).read_text(encoding="utf-8"))
    version, fields = KINDS[kind]
    if (told.pop("apiVersion"), told.pop("kind")) != (version, kind):
        raise KustomizeError(f"{folder.name}: not a {kind} of {version}")
    if unknown := set(told) - fields:
        raise KustomizeError(f"{folder.name}: unknown field {min(unknown)}")
    return told


def containers_in(value: Any) -> Iterator[Document]:
    """All containers, wherever they stand: kustomize looks for the lists by name, in custom resources too."""
    parts = value.items() if isinstance(value, dict) else ((None, part) for part in value)
    for name, part in parts:
        if name in LISTS_OF_CONTAINERS and isinstance(part, list):
            yield from part
        if isinstance(part, (dict, list)):
            yield from containers_in(part)


def _resources(folder: Path, name: str) -> list[Document]:
    path = (folder / name).resolve()
    if path.is_dir():
        return rendered(path)
    if not path.is_relative_to(folder.resolve()):
        raise KustomizeError(f"{folder.name}: {name} lies outside of the folder: kustomize reads no file there")
    return read_all(path)


def _renamed(image: str, change: Document) -> str:
    name, _, tag = image.rpartition(":")
    if name != change["name"]:
        return image
    return f"{change.get('newName', name)}:{change.get('newTag', tag)}"
