// When a saved notebook is opened, its widgets have no models. Their saved HTML is shown instead.

import { CodeCell } from '@jupyterlab/cells';
import type { INotebookTracker, NotebookPanel } from '@jupyterlab/notebook';
import type { IOutputModel } from '@jupyterlab/rendermime';

const HTML = 'text/html';
/** Metadata key of the outputs of this package. */
const METADATA_KEY = 'tfd_notebook';
/** Text that ipywidgets shows in place of a widget without a model. */
const MODEL_NOT_FOUND = 'model not found';

/** Replace widgets without a model by their saved HTML. */
export function restoreSavedViews(notebooks: INotebookTracker): void {
  notebooks.forEach(observe);
  notebooks.widgetAdded.connect((_, panel) => observe(panel));
}

function observe(panel: NotebookPanel): void {
  const observer = new MutationObserver(records => {
    for (const { addedNodes } of records) {
      for (const node of addedNodes) {
        // Check only text nodes, because live widgets change their elements often.
        if (node.nodeType === Node.TEXT_NODE && node.nodeValue?.includes(MODEL_NOT_FOUND)) {
          replace(panel, node);
        }
      }
    }
  });
  observer.observe(panel.content.node, { subtree: true, childList: true });
  panel.disposed.connect(() => observer.disconnect());
}

function replace(panel: NotebookPanel, text: Node): void {
  const parent = text.parentElement;
  const output = parent && outputAt(panel, parent);
  if (parent && output?.metadata[METADATA_KEY] !== undefined && output.data[HTML] !== undefined) {
    const renderer = panel.content.rendermime.createRenderer(HTML);
    panel.disposed.connect(() => renderer.dispose());
    void renderer.renderModel(output).then(() => parent.replaceChildren(renderer.node));
  }
}

function outputAt(panel: NotebookPanel, node: Node): IOutputModel | undefined {
  for (const cell of panel.content.widgets) {
    if (cell instanceof CodeCell && cell.node.contains(node)) {
      const at = cell.outputArea.widgets.findIndex(widget => widget.node.contains(node));
      return at < 0 ? undefined : cell.outputArea.model.get(at);
    }
  }
  return undefined;
}
