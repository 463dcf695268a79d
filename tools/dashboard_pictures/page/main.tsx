/** Draw a dashboard with Grafana's own components from window.DATA; ?theme=light draws it in the light theme. */
import '@fontsource/inter/400.css';
import '@fontsource/inter/500.css';
import '@fontsource/roboto-mono/400.css';
import { createTheme, type DataFrame, dateTime, EventBusSrv, ThemeContext } from '@grafana/data';
import { initPluginTranslations } from '@grafana/i18n';
import { GlobalStyles, PanelChrome, PanelContextProvider } from '@grafana/ui';
import * as React from 'react';
import { createRoot } from 'react-dom/client';
import { check, checkLabels, report } from './check';
import { dataOf, registerTransformers } from './data';
import { Visualization } from './visualizations';

const CELL = 30; // the grid of Grafana's dashboards, in pixels
const GAP = 8;
const MARGIN = 16;
const SETTLED_MS = 5000; // of virtual time: fonts, tables and graphs measure themselves and draw again

const { dashboard, answers, from, to } = (window as any).DATA;
const mode = new URLSearchParams(location.search).get('theme') === 'light' ? 'light' : 'dark';
const theme = createTheme({ colors: { mode } });
const [start, end] = [dateTime(from), dateTime(to)];
const timeRange = { from: start, to: end, raw: { from: start, to: end } };
const column = (document.documentElement.clientWidth - 2 * MARGIN + GAP) / 24;

/** Shows the error of a panel in its place, and reports it. */
class Guard extends React.Component<any, { error?: unknown }> {
  state: { error?: unknown } = {};

  static getDerivedStateFromError(error: unknown) {
    return { error };
  }

  componentDidCatch(error: unknown) {
    report({ panel: this.props.title, problem: 'error', details: String(error) });
  }

  render() {
    return this.state.error ? <pre>{String(this.state.error)}</pre> : this.props.children;
  }
}

function Panel({ panel }: any) {
  const [frames, setFrames] = React.useState<DataFrame[]>();
  React.useEffect(() => {
    const draw = (frames: DataFrame[]) => {
      checkLabels(panel.title, frames);
      setFrames(frames);
    };
    dataOf(panel, answers, theme)
      .then(draw)
      .catch((error) => report({ panel: panel.title, problem: 'error', details: String(error.stack) }));
  }, [panel]);
  const { x, y, w, h } = panel.gridPos;
  const [width, height] = [w * column - GAP, h * (CELL + GAP) - GAP];
  const style = { position: 'absolute', left: x * column, top: y * (CELL + GAP), width, height } as const;
  if (panel.type === 'row') {
    return <div style={{ ...style, fontWeight: 500, padding: '4px 8px' }}>{`${panel.collapsed ? '›' : '⌄'} ${panel.title}`}</div>;
  }
  return (
    <div style={style} data-panel={panel.title} data-type={panel.type}>
      <PanelChrome title={panel.title} description={panel.description} width={width} height={height} padding="md">
        {(width, height) => (
          <Guard title={panel.title}>
            {frames && <Visualization {...{ panel, frames, width, height, theme, timeRange }} />}
          </Guard>
        )}
      </PanelChrome>
    </div>
  );
}

async function main(): Promise<void> {
  await Promise.all(['400 14px Inter', '500 14px Inter', '400 14px "Roboto Mono"'].map((font) => document.fonts.load(font)));
  await initPluginTranslations('torchotel-pictures');
  registerTransformers();
  createRoot(document.getElementById('root')!).render(
    <ThemeContext.Provider value={theme}>
      <GlobalStyles />
      <PanelContextProvider value={{ eventsScope: 'page', eventBus: new EventBusSrv() }}>
        <h3 style={{ margin: `12px ${MARGIN}px`, height: 24 }}>{dashboard.title}</h3>
        <div style={{ position: 'relative', margin: `0 ${MARGIN}px` }}>
          {dashboard.panels.map((panel: any) => (
            <Panel key={panel.id} panel={panel} />
          ))}
        </div>
      </PanelContextProvider>
    </ThemeContext.Provider>,
  );
  setTimeout(check, SETTLED_MS);
}

main().catch((error) => report({ panel: '', problem: 'error', details: String(error.stack) }));
