// Import this module before modules that import Lumino: jsdom has no drag events, which it extends.
globalThis.DragEvent ??= class extends MouseEvent {} as typeof DragEvent;
