package verify

import (
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/google/uuid"

	"github.com/onceledger/onceledger/internal/money"
)

// Kind is a way in which books can be wrong.
type Kind string

// The kinds of violations.
const (
	Lost         Kind = "lost"          // the pipeline is past a committed change, and an effect is missing
	Held         Kind = "held"          // a committed change waits in a dead letter, and its effect with it
	Duplicated   Kind = "duplicated"    // an effect is there more than once
	Phantom      Kind = "phantom"       // an effect or event is there without the change that would cause it
	Unbalanced   Kind = "unbalanced"    // a ledger entry is not over what its document says
	WrongAmount  Kind = "wrong-amount"  // amounts are not what the order's lines come to
	VersionGap   Kind = "version-gap"   // versions are not 1, 2, 3 … up to the order's
	MissingEvent Kind = "missing-event" // a committed change left no event in the outbox
	NumberGap    Kind = "number-gap"    // document numbers are not 1, 2, 3 … up to the last given out
	TrialBalance Kind = "trial-balance" // an account is not what the orders come to
	TopicBalance Kind = "topic-balance" // an account on the topic ledger.balances is not what the ledger says
)

// Kinds are all kinds, in the order of a report.
var Kinds = []Kind{Lost, Held, Duplicated, Phantom, Unbalanced, WrongAmount, VersionGap, MissingEvent, NumberGap, TrialBalance, TopicBalance}

// MaxNamed is how many violations of a kind are named; the others are counted.
const MaxNamed = 20

// Finding names one violation. OrderID and EventID are zero where there is none.
type Finding struct {
	Kind     Kind      `json:"kind"`
	TenantID uuid.UUID `json:"tenant_id"`
	OrderID  uuid.UUID `json:"order_id,omitzero"`
	EventID  uuid.UUID `json:"event_id,omitzero"`
	Detail   string    `json:"detail"`
}

// Report is what a run found. InFlight counts committed changes that the
// pipeline has not come to yet: they are not violations.
type Report struct {
	OK     bool `json:"ok"`
	Orders struct {
		Total     int64 `json:"total"`
		Created   int64 `json:"created"` // neither paid nor cancelled
		Paid      int64 `json:"paid"`
		Cancelled int64 `json:"cancelled"`
		Refunded  int64 `json:"refunded"` // of those paid, in part or whole
	} `json:"orders"`
	Refunds       int64 `json:"refunds"`
	Invoices      int64 `json:"invoices"`
	CreditNotes   int64 `json:"credit_notes"`
	LedgerEntries int64 `json:"ledger_entries"`
	InFlight      int64 `json:"in_flight"`
	DeadLetters   struct {
		Open   int64 `json:"open"`
		Parked int64 `json:"parked"` // behind an open one
	} `json:"dead_letters"`
	Topic        TopicReport    `json:"topic_balances"`
	Violations   map[Kind]int64 `json:"violations"`
	Findings     []Finding      `json:"findings"` // the first MaxNamed of each kind
	TrialBalance []Balance      `json:"trial_balance"`
	Notes        []string       `json:"notes"` // what could not be judged, and why
}

// TopicState is how the comparison with the topic ledger.balances ended.
type TopicState string

// The states. Empty is for a topic that was not asked for.
const (
	TopicEqual   TopicState = "equal"
	TopicDiffers TopicState = "differs"
	TopicBehind  TopicState = "not compared" // a note says why
)

// TopicReport is what came of the comparison with the topic ledger.balances.
type TopicReport struct {
	State    TopicState `json:"state"`
	Accounts int64      `json:"accounts"` // on the topic, of all tenants
}

// Balance is an account over all tenants, in minor units. Recomputed is what
// debit − credit must be, by the orders whose effects are in the ledger.
type Balance struct {
	Currency   string `json:"currency"`
	Account    string `json:"account"`
	Debit      int64  `json:"debit"`
	Credit     int64  `json:"credit"`
	Recomputed int64  `json:"recomputed"`
}

func newReport() *Report {
	report := &Report{OK: true, Violations: make(map[Kind]int64), Findings: []Finding{}, TrialBalance: []Balance{}, Notes: []string{}}
	for _, kind := range Kinds {
		report.Violations[kind] = 0
	}
	return report
}

// Count is the number of violations.
func (r *Report) Count() int64 {
	var sum int64
	for _, count := range r.Violations {
		sum += count
	}
	return sum
}

func (r *Report) add(findings ...Finding) {
	for _, finding := range findings {
		r.OK = false
		if r.Violations[finding.Kind]++; r.Violations[finding.Kind] <= MaxNamed {
			r.Findings = append(r.Findings, finding)
		}
	}
}

func (r *Report) note(text string, args ...any) {
	if text = fmt.Sprintf(text, args...); !slices.Contains(r.Notes, text) {
		r.Notes = append(r.Notes, text)
	}
}

// WriteText writes the report for a person.
func (r *Report) WriteText(w io.Writer) error {
	text := new(strings.Builder)
	row := func(name string, count int64, more string, args ...any) {
		line := fmt.Sprintf("%-15s %9d   ", name, count) + fmt.Sprintf(more, args...)
		fmt.Fprintln(text, strings.TrimRight(line, " "))
	}
	row("orders", r.Orders.Total, "%d created, %d paid (%d of them refunded), %d cancelled",
		r.Orders.Created, r.Orders.Paid, r.Orders.Refunded, r.Orders.Cancelled)
	row("invoices", r.Invoices, "for %d paid orders", r.Orders.Paid)
	row("credit notes", r.CreditNotes, "for %d refunds", r.Refunds)
	row("ledger entries", r.LedgerEntries, "for %d payments and refunds", r.Orders.Paid+r.Refunds)
	row("in flight", r.InFlight, "")
	row("dead letters", r.DeadLetters.Open+r.DeadLetters.Parked, "%d open, %d parked behind them", r.DeadLetters.Open, r.DeadLetters.Parked)
	switch r.Topic.State {
	case "":
	case TopicBehind:
		row("topic balances", 0, "not compared: see below")
	case TopicEqual, TopicDiffers:
		row("topic balances", r.Topic.Accounts, "accounts, %s", map[TopicState]string{
			TopicEqual: "equal to the ledger's", TopicDiffers: "which differ from the ledger's"}[r.Topic.State])
	}
	fmt.Fprintln(text)
	for _, kind := range Kinds {
		row(strings.ReplaceAll(string(kind), "-", " "), r.Violations[kind], "")
	}
	r.writeTrialBalance(text)
	r.writeFindings(text)

	fmt.Fprintln(text)
	for _, note := range r.Notes {
		fmt.Fprintln(text, "note:", note)
	}
	switch {
	case !r.OK:
		fmt.Fprintf(text, "The books are NOT right: %d violations.\n", r.Count())
	case r.Orders.Total == 0:
		fmt.Fprintln(text, "There are no orders yet, so there is nothing that could be wrong.")
	case r.InFlight > 0:
		fmt.Fprintf(text, "The books are right, and %d changes are on their way into them.\n", r.InFlight)
	default:
		fmt.Fprintln(text, "The books are right.")
	}
	_, err := io.WriteString(w, text.String())
	return err
}

func (r *Report) writeTrialBalance(w io.Writer) {
	row := func(name string, b Balance) {
		fmt.Fprintf(w, "%-15s", name)
		for _, minor := range []int64{b.Debit, b.Credit, b.Debit - b.Credit, b.Recomputed} {
			fmt.Fprintf(w, " %17s", decimal(minor, b.Currency))
		}
		fmt.Fprintln(w)
	}
	var sum Balance
	for i, b := range r.TrialBalance {
		if b.Currency != sum.Currency {
			sum = Balance{Currency: b.Currency}
			fmt.Fprintf(w, "\n%-15s %17s %17s %17s %17s\n", b.Currency, "debit", "credit", "balance", "recomputed")
		}
		row(b.Account, b)
		sum.Debit += b.Debit
		sum.Credit += b.Credit
		sum.Recomputed += b.Recomputed
		if last := i == len(r.TrialBalance)-1; last || r.TrialBalance[i+1].Currency != b.Currency {
			row("", sum)
		}
	}
}

func (r *Report) writeFindings(w io.Writer) {
	for _, kind := range Kinds {
		if r.Violations[kind] == 0 {
			continue
		}
		fmt.Fprintf(w, "\n%s:\n", kind)
		for _, finding := range r.Findings {
			if finding.Kind == kind {
				fmt.Fprintf(w, "  %s\n", finding)
			}
		}
		if more := r.Violations[kind] - MaxNamed; more > 0 {
			fmt.Fprintf(w, "  … and %d more\n", more)
		}
	}
}

func (f Finding) String() string {
	text := ""
	if f.OrderID != uuid.Nil {
		text += "order " + f.OrderID.String() + ", "
	}
	if f.EventID != uuid.Nil {
		text += "event " + f.EventID.String() + ", "
	}
	return text + "tenant " + f.TenantID.String() + ": " + f.Detail
}

func show(a amounts, currency string) string {
	return fmt.Sprintf("%s (net %s, tax %s)", format(a.Total, currency), decimal(a.Net, currency), decimal(a.Tax, currency))
}

func format(minor int64, currency string) string { return decimal(minor, currency) + " " + currency }

// decimal writes minor units with the currency's decimals: 1234 as 12.34.
func decimal(minor int64, currency string) string {
	return decimalText(strconv.FormatInt(minor, 10), currency)
}

// decimalText does it for a number that is text, and may be of any size.
func decimalText(digits, currency string) string {
	exponent := money.Currency(currency).Exponent()
	sign := ""
	if positive, negative := strings.CutPrefix(digits, "-"); negative {
		sign, digits = "-", positive
	}
	if exponent == 0 {
		return sign + digits
	}
	if short := exponent + 1 - len(digits); short > 0 {
		digits = strings.Repeat("0", short) + digits
	}
	point := len(digits) - exponent
	return sign + digits[:point] + "." + digits[point:]
}
