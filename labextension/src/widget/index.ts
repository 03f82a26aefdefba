// The widget of notebooks, as anywidget renders it.

import { ensureStyle } from '../shared/css';
import { h, setText, show } from '../shared/dom';
import type { Link } from '../shared/link';
import { ResolveView } from '../shared/resolveView';
import { StartForm } from '../shared/startForm';
import type { IActions, IView } from '../shared/view';
import { type IModel, useLink } from './model';
import { KINDS, Tabs } from './tabs';

const ACTIONS: IActions = { readOnly: false, who: 'the widget' };

function render({ model, el }: { model: IModel; el: HTMLElement }): () => void {
  ensureStyle();
  const { link, release } = useLink(model);
  let view: IView | null = null;
  let shown = '';
  // What the form said when it had started the cluster that is in its place now.
  const said = h('div', { class: 'tfd-asked tfd-good', hidden: true });
  const saying = h('div', { class: 'tfd-live' }, said);
  el.append(saying);
  const word = (name: string) => {
    const value = model.get(name);
    return typeof value === 'string' ? value : '';
  };
  const put = (cluster: string, words = '') => {
    const wanted = `${word('view')} ${cluster}`;
    if (wanted !== shown) {
      shown = wanted;
      view?.dispose();
      setText(said, words);
      show(said, words !== '');
      view = viewOf(word('view'), cluster, link, put);
      el.append(view.node);
    }
  };
  const changed = () => put(word('cluster'));
  // Notebooks take keys such as Enter or the arrows for their cells, unless they see this.
  el.dataset.lmSuppressShortcuts = 'true';
  model.on('change:cluster', changed);
  model.on('change:view', changed);
  changed();
  return () => {
    model.off('change:cluster', changed);
    model.off('change:view', changed);
    view?.dispose();
    saying.remove();
    release();
  };
}

function viewOf(
  kind: string,
  cluster: string,
  link: Link,
  put: (cluster: string, said: string) => void
): IView {
  if (!cluster) {
    return kind === 'start'
      ? new StartForm(link, ACTIONS, put)
      : kind === 'resolve'
        ? new ResolveView(link, ACTIONS, put)
        : note('There is no cluster to show. Next: tfd.Cluster(data_workers=2)');
  }
  if (['start', 'resolve', 'cluster'].includes(kind)) {
    return new Tabs(link, cluster, ACTIONS);
  }
  const View = KINDS[kind] as (typeof KINDS)[string] | undefined;
  return View ? new View(link, cluster, ACTIONS) : note(`There is no view “${kind}”.`);
}

function note(words: string): IView {
  const node = h('div', { class: 'tfd-live' }, words);
  return { node, dispose: () => node.remove() };
}

export default { render };
