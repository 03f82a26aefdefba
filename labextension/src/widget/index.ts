// The notebook widget, rendered by anywidget.

import { ensureStyle } from '../shared/css';
import { h, setText, show } from '../shared/dom';
import type { Link } from '../shared/link';
import { ResolveView } from '../shared/resolveView';
import { StartForm } from '../shared/startForm';
import type { IActions, IView } from '../shared/view';
import { type IModel, useLink } from './model';
import { KINDS, Tabs } from './tabs';

const ACTIONS: IActions = { readOnly: false, source: 'the widget' };

function render({ model, el }: { model: IModel; el: HTMLElement }): () => void {
  ensureStyle();
  const { link, release } = useLink(model);
  let view: IView | null = null;
  let shown = '';
  // The success message of a form, shown above the cluster that replaces it.
  const message = h('div', { class: 'tfd-status-line tfd-good', hidden: true });
  const messageBox = h('div', { class: 'tfd-live' }, message);
  el.append(messageBox);
  const trait = (name: string) => {
    const value = model.get(name);
    return typeof value === 'string' ? value : '';
  };
  const showView = (cluster: string, text = '') => {
    const key = `${trait('view')} ${cluster}`;
    if (key !== shown) {
      shown = key;
      view?.dispose();
      setText(message, text);
      show(message, text !== '');
      view = viewOf(trait('view'), cluster, link, showView);
      el.append(view.node);
    }
  };
  const changed = () => showView(trait('cluster'));
  // Without this, the notebook handles keys such as Enter and the arrows.
  el.dataset.lmSuppressShortcuts = 'true';
  model.on('change:cluster', changed);
  model.on('change:view', changed);
  changed();
  return () => {
    model.off('change:cluster', changed);
    model.off('change:view', changed);
    view?.dispose();
    messageBox.remove();
    release();
  };
}

function viewOf(
  kind: string,
  cluster: string,
  link: Link,
  showView: (cluster: string, message: string) => void
): IView {
  if (!cluster) {
    return kind === 'start'
      ? new StartForm(link, ACTIONS, showView)
      : kind === 'resolve'
        ? new ResolveView(link, ACTIONS, showView)
        : textView('No cluster. Next: tfd.Cluster(data_workers=2)');
  }
  if (['start', 'resolve', 'cluster'].includes(kind)) {
    return new Tabs(link, cluster, ACTIONS);
  }
  const View = KINDS[kind] as (typeof KINDS)[string] | undefined;
  return View
    ? new View(link, cluster, ACTIONS)
    : textView(`Invalid view “${kind}”: expected one of ${Object.keys(KINDS).join(', ')}.`);
}

function textView(text: string): IView {
  const node = h('div', { class: 'tfd-live' }, text);
  return { node, dispose: () => node.remove() };
}

export default { render };
